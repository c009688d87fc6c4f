"""From a plan to programs on lanes: this machine's cores, or streams of a device."""
