"""Generated from schemas/routing.fbs by scripts/gen-schemas."""
