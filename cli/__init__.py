"""The command line: argparse verbs over the library. Nobody imports it."""
