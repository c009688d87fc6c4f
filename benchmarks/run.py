"""``make bench``: all CPU cases."""

from runner import main

if __name__ == "__main__":
    main()
