"""Below all other subpackages: argument checks, and functions for private names of Keras."""

from ga_model.base._validate import check_releases

check_releases()  # before other imports here fail on an older release
