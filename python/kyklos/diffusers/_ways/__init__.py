"""How forwards of a split transformer run: as options say, or as their times show."""
