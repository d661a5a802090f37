//! Memory limits of the control groups that this process is in: those of containers and batch systems.

use std::fs;
use std::path::{Path, PathBuf};

/// What a control group may use and what is left of it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupMemory {
    pub(super) limit_bytes: u64,
    pub(super) available_bytes: u64,
}

/// The files of one version of control groups.
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    /// The line in `memory.stat` with the cached files that the kernel drops first.
    cached: &'static str,
}

const V1: GroupFiles =
    GroupFiles { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", cached: "total_inactive_file" };
const V2: GroupFiles = GroupFiles { limit: "memory.max", usage: "memory.current", cached: "inactive_file" };

/// The limits of the process's group and of those around it. `mount` is /sys/fs/cgroup, `membership` the text of
/// /proc/self/cgroup: lines `number:controllers:path`, without controllers in version 2.
pub(super) fn limits(mount: &Path, membership: &str) -> Vec<GroupMemory> {
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (mount, files) = match controllers {
            "" => (mount.to_owned(), V2),
            names if names.split(',').any(|name| name == "memory") => (mount.join("memory"), V1),
            _ => return None,
        };
        Some(limits_from(&mount, path, &files))
    };
    membership.lines().filter_map(group).flatten().collect()
}

/// Also looks in the folders above: a container may see its own group as the root.
fn limits_from(mount: &Path, path: &str, files: &GroupFiles) -> Vec<GroupMemory> {
    let group: PathBuf = mount.join(path.trim_start_matches('/'));
    let around = group.ancestors().take_while(|folder| folder.starts_with(mount));
    around.filter_map(|folder| limit(folder, files)).collect()
}

/// `None` without a limit, which version 2 calls `max`.
fn limit(folder: &Path, files: &GroupFiles) -> Option<GroupMemory> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit_bytes = number(files.limit)?;
    let used = number(files.usage)?.saturating_sub(cached(folder, files).unwrap_or(0)); // without the line, all counts as used
    Some(GroupMemory { limit_bytes, available_bytes: limit_bytes.saturating_sub(used) })
}

fn cached(folder: &Path, files: &GroupFiles) -> Option<u64> {
    let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == files.cached)?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = folder.join(name);
            fs::create_dir_all(crate::files::parent(&path)).unwrap();
            crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        }
    }

    #[test]
    fn the_limits_of_a_group_and_of_those_around_it_are_read() {
        let mount = tempfile::tempdir().unwrap();
        write(
            mount.path(),
            &[
                ("job/memory.max", "8000\n"),
                ("job/memory.current", "5000\n"),
                ("job/memory.stat", "anon 1000\ninactive_file 3000\nactive_file 1000\n"),
                ("job/step/memory.max", "max\n"),
                ("job/step/memory.current", "100\n"),
            ],
        );
        let job = GroupMemory { limit_bytes: 8000, available_bytes: 6000 };
        assert_eq!(limits(mount.path(), "0::/job/step\n"), [job]);
        assert_eq!(limits(mount.path(), "0::/\n"), []);
    }

    #[test]
    fn a_container_of_version_1_sees_its_group_as_the_root() {
        let mount = tempfile::tempdir().unwrap();
        let files = [("memory/memory.limit_in_bytes", "4000\n"), ("memory/memory.usage_in_bytes", "4500\n")];
        write(mount.path(), &files);
        let full = GroupMemory { limit_bytes: 4000, available_bytes: 0 };
        assert_eq!(limits(mount.path(), "9:cpuset:/docker/1\n4:hugetlb,memory:/docker/1\n0::/\n"), [full]);
    }
}
