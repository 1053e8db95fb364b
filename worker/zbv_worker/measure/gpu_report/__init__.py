"""TODO: say what gpu_report is for."""
