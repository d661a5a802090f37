//! How much memory this process holds.

/// Bytes of the process in memory now, and the most it ever held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident now.
    pub resident_bytes: u64,
    /// The most that was ever resident.
    pub peak_bytes: u64,
}

/// Reads the kernel's own figures; `None` where there is no `/proc`.
pub fn process() -> Option<ProcessMemory> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(ProcessMemory { resident_bytes: field(&status, "VmRSS:")?, peak_bytes: field(&status, "VmHWM:")? })
}

/// The machine's memory: total and available bytes; `None` where there is no `/proc`.
pub fn machine() -> Option<(u64, u64)> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some((field(&info, "MemTotal:")?, field(&info, "MemAvailable:")?))
}

/// The kernel writes `Name:   1234 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_at_least_what_is_resident() {
        let memory = super::process().unwrap();
        assert!(memory.peak_bytes >= memory.resident_bytes && memory.resident_bytes > 0);
    }
}
