"""What every benchmark needs: statistics, tables, the machine it ran on, and the JSON file."""
