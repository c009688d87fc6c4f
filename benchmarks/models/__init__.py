"""What is measured: functions of JAX, models in both frameworks, sentences."""
