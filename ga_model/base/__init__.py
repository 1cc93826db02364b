"""What everything else stands on: checks of arguments, texts of errors, private names of Keras.

May import nothing of the package.
"""

from ga_model.base._validate import check_releases

check_releases()  # before anything here looks for a name that an older release has not
