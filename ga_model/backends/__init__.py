"""The backends of Keras, one folder for each."""
