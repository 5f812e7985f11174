"""The checks of ``runguard doctor``."""
