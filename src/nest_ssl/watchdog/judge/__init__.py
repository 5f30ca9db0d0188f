"""Which rank is to blame: exceptions, collectives, and the rules that weigh them."""
