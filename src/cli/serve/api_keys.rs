//! `--api-key-file` and `MEDUSA_API_KEY`.

use std::path::PathBuf;
use std::{env, fs};

use anyhow::Context;
use clap::Args;

use crate::cli::UsageError;
use crate::serve::auth::ApiKeys;

/// The environment variable of a single key.
const VARIABLE: &str = "MEDUSA_API_KEY";

/// Where the API keys are.
#[derive(Debug, Clone, Args)]
pub(super) struct ApiKeyFlags {
    /// File of API keys, one a line; clients must send one of them. MEDUSA_API_KEY sets a single key [default: no key is needed].
    #[arg(long, help_heading = "Server", value_name = "F")]
    api_key_file: Option<PathBuf>,
}

impl ApiKeyFlags {
    /// The keys of the file, else that of the environment.
    pub(super) fn read(&self) -> anyhow::Result<ApiKeys> {
        let Some(file) = &self.api_key_file else {
            return match env::var(VARIABLE) {
                Ok(key) if key.trim().is_empty() => {
                    Err(UsageError(format!("{VARIABLE} is empty; unset it, or set a key")).into())
                }
                Ok(key) => Ok(ApiKeys::new([key.trim()])),
                Err(env::VarError::NotPresent) => Ok(ApiKeys::default()),
                Err(env::VarError::NotUnicode(_)) => Err(UsageError(format!("{VARIABLE} is not UTF-8")).into()),
            };
        };
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read --api-key-file {}", file.display()))?;
        let keys: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        anyhow::ensure!(!keys.is_empty(), "--api-key-file {} has no key; expected one a line", file.display());
        Ok(ApiKeys::new(keys))
    }
}
