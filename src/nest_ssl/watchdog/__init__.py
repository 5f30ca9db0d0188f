"""Who stalls, where and why: the beacon that ranks write, the monitor that reads it, its judgement and its report."""
