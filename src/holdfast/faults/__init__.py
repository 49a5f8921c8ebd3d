"""Damage: finds it, follows it to what it reaches, and rebuilds what is lost."""
