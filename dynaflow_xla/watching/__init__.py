"""What happens, told to whoever asks: log records, counters, progress."""
