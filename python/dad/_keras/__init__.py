"""What dad.keras and dad.tensorflow.keras share: nothing here imports a Keras."""
