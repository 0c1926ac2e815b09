"""The training engine: one step (`loop`), other plans in mid-training (`replanner`), and the public face (`engine`)."""
