"""`python -m nest_ssl` is `nest-ssl`."""

from nest_ssl.cli.main import main

if __name__ == "__main__":
    main()
