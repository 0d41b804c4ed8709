"""The clocks under the name that tutorials import them by; calibration uses them, too, so they lie in `pricing`."""

from onepass.pricing.timing import Clock, CpuClock, CudaClock, Run, WallClock, clock_for, devices, host_time

__all__ = ["Clock", "CpuClock", "CudaClock", "Run", "WallClock", "clock_for", "devices", "host_time"]
