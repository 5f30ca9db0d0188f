"""Who a rank is; starting, comparing and ending ranks; checking the machine."""
