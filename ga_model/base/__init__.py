"""What everything else stands on: checks of arguments, texts of errors, private names of Keras.

May import nothing of the package.
"""
