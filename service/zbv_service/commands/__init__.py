"""The commands of ``zbv-service``, a module each. Heavy parts are imported by the commands that need them."""
