"""Below all other subpackages: argument checks, and functions for private names of Keras.

May import no other subpackage.
"""

from ga_model.base._validate import check_releases

check_releases()  # before other imports here fail on an older release
