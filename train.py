"""`python train.py [overrides]` is `nest-ssl pretrain [overrides]`."""

import sys

from nest_ssl.cli.main import main

if __name__ == "__main__":
    main(["pretrain", *sys.argv[1:]])
