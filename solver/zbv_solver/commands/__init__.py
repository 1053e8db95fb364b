"""What the commands of ``zbv`` have in common: files, progress and tables. No command is here."""
