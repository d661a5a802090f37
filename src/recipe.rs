//! A recipe is a whole run. The only TOML reader.
