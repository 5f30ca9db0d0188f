"""Many ranks that cannot hang in silence: launching, the beacon, the monitor, blame and evidence."""
