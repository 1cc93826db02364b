"""The base of all rooms: checks of arguments, private names of Keras.

May import nothing of the package.
"""

from ga_model.base._validate import check_releases

check_releases()  # before any import here fails on an older release
