//! Which process of a run this is, and where the others are found: from the variables of torchrun, or of Slurm's srun.

use std::num::ParseIntError;

/// The place of a process in a run of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// This process, from 0.
    pub rank: usize,
    /// All processes; above 1.
    pub world_size: usize,
    /// This process among those of its machine, if the environment says.
    pub local: Option<LocalRank>,
    /// The server of the store.
    pub host: String,
    pub port: u16,
    /// Whether this process is the server.
    pub serves_store: bool,
    /// Keys of this start of the run: torchrun keeps its store when it starts the processes again.
    pub prefix: String,
}

/// A process among those of its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// From 0.
    pub rank: usize,
    /// The processes on this machine.
    pub world_size: usize,
}

/// What is wrong with the variables.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// One of torchrun's variables is set, and another is not.
    #[error(
        "{set} is set, but {missing} is not: start the processes with torchrun, srun or --nproc, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    Missing { set: &'static str, missing: &'static str },
    #[error("expected a whole number in {name}, got {value:?} ({source})")]
    NotANumber { name: &'static str, value: String, source: ParseIntError },
    #[error("{name} is {rank}, but {size_name} is {world_size}: ranks go from 0 to {size_name} - 1")]
    RankTooLarge { name: &'static str, rank: usize, size_name: &'static str, world_size: usize },
    /// Two variables name different numbers of processes.
    #[error(
        "WORLD_SIZE is {size}, but srun started {tasks} tasks (SLURM_STEP_NUM_TASKS): unset WORLD_SIZE to train with all of them, or set RANK, \
         too: RANK=0 WORLD_SIZE=1 makes each task a run of its own"
    )]
    OtherTasks { size: usize, tasks: usize },
    /// Slurm's list of machines cannot be read.
    #[error("the first machine of SLURM_STEP_NODELIST={list:?} cannot be read: set MASTER_ADDR to its name")]
    NodeList { list: String },
}

/// Reads a variable.
pub type Variables<'v> = &'v dyn Fn(&str) -> Option<String>;

/// torchrun's variables.
const RANK: &str = "RANK";
const WORLD_SIZE: &str = "WORLD_SIZE";
const LOCAL_RANK: &str = "LOCAL_RANK";
const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// torchrun's own process is the server of the store.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// Slurm's variables of a job step: those of the job are also set where nothing was started by srun.
const SLURM_PROCID: &str = "SLURM_PROCID";
const SLURM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
const SLURM_LOCALID: &str = "SLURM_LOCALID";
const SLURM_NODES: &str = "SLURM_STEP_NODELIST";
const SLURM_JOB: &str = "SLURM_JOB_ID";

/// Ports of jobs without `MASTER_PORT`: Slurm's own range of ports for users ends below.
const SLURM_PORTS: std::ops::Range<u16> = 20_000..30_000;

impl Rendezvous {
    /// The place of this process; `None` if it is the only one.
    ///
    /// # Errors
    /// [`RendezvousError`] if the variables contradict each other.
    pub fn from(variables: Variables) -> Result<Option<Self>, RendezvousError> {
        let (rank, size) = (number::<usize>(variables, RANK)?, number(variables, WORLD_SIZE)?);
        let tasks = number(variables, SLURM_TASKS)?.filter(|&tasks| tasks > 1);
        match (rank, size, tasks) {
            (Some(_), None, _) => Err(RendezvousError::Missing { set: RANK, missing: WORLD_SIZE }),
            // torchrun's win: srun may have started torchrun on each machine, or runs that have nothing to do with each other.
            (Some(rank), Some(size), _) => {
                check_rank((RANK, rank), (WORLD_SIZE, size))?;
                if size == 1 { Ok(None) } else { Self::from_torchrun(variables, rank, size).map(Some) }
            }
            (None, Some(size), Some(tasks)) if size != tasks => Err(RendezvousError::OtherTasks { size, tasks }),
            (None, _, Some(tasks)) => Self::from_slurm(variables, tasks).map(Some),
            // Some schedulers set it for a single process, too.
            (None, Some(1) | None, None) => Ok(None),
            (None, Some(_), None) => Err(RendezvousError::Missing { set: WORLD_SIZE, missing: RANK }),
        }
    }

    /// One of `world_size` processes on one machine, whose store is served by the process that starts them.
    pub fn variables_of_local(rank: usize, world_size: usize, port: u16) -> Vec<(&'static str, String)> {
        vec![
            (RANK, rank.to_string()),
            (WORLD_SIZE, world_size.to_string()),
            (LOCAL_RANK, rank.to_string()),
            (LOCAL_WORLD_SIZE, world_size.to_string()),
            (MASTER_ADDR, "127.0.0.1".to_owned()),
            (MASTER_PORT, port.to_string()),
            (AGENT_STORE, "True".to_owned()),
        ]
    }

    /// Whether all processes run on this machine, as far as the variables say.
    pub fn is_of_one_machine(&self) -> bool {
        ["127.0.0.1", "localhost", "::1"].contains(&self.host.as_str())
            || self.local.is_some_and(|local| local.world_size == self.world_size)
    }

    fn from_torchrun(variables: Variables, rank: usize, world_size: usize) -> Result<Self, RendezvousError> {
        let needed = |missing| RendezvousError::Missing { set: RANK, missing };
        let host = variables(MASTER_ADDR).ok_or(needed(MASTER_ADDR))?;
        let port = number(variables, MASTER_PORT)?.ok_or(needed(MASTER_PORT))?;
        let local = match (number(variables, LOCAL_RANK)?, number(variables, LOCAL_WORLD_SIZE)?) {
            (Some(rank), Some(world_size)) => {
                check_rank((LOCAL_RANK, rank), (LOCAL_WORLD_SIZE, world_size))?;
                Some(LocalRank { rank, world_size })
            }
            _ => None,
        };
        let serves_store = rank == 0 && variables(AGENT_STORE).as_deref() != Some("True");
        let prefix = format!("medusa/{}", variables(RESTART_COUNT).unwrap_or_default());
        Ok(Self { rank, world_size, local, host, port, serves_store, prefix })
    }

    fn from_slurm(variables: Variables, world_size: usize) -> Result<Self, RendezvousError> {
        let needed = |missing| RendezvousError::Missing { set: SLURM_TASKS, missing };
        let rank = number(variables, SLURM_PROCID)?.ok_or(needed(SLURM_PROCID))?;
        check_rank((SLURM_PROCID, rank), (SLURM_TASKS, world_size))?;
        let host = match variables(MASTER_ADDR) {
            Some(host) => host,
            None => first_machine(&variables(SLURM_NODES).ok_or(needed(SLURM_NODES))?)?,
        };
        let port = match number(variables, MASTER_PORT)? {
            Some(port) => port,
            None => port_of_job(number(variables, SLURM_JOB)?.ok_or(needed(SLURM_JOB))?),
        };
        // The number of tasks on this machine is in a list for all machines: ranks count themselves.
        let _: Option<usize> = number(variables, SLURM_LOCALID)?;
        Ok(Self { rank, world_size, local: None, host, port, serves_store: rank == 0, prefix: "medusa".into() })
    }
}

fn port_of_job(job: u64) -> u16 {
    SLURM_PORTS.start + (job % u64::from(SLURM_PORTS.end - SLURM_PORTS.start)) as u16
}

fn number<N: std::str::FromStr<Err = ParseIntError>>(
    variables: Variables,
    name: &'static str,
) -> Result<Option<N>, RendezvousError> {
    let Some(value) = variables(name) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|source| RendezvousError::NotANumber { name, value, source })
}

fn check_rank(
    (name, rank): (&'static str, usize),
    (size_name, world_size): (&'static str, usize),
) -> Result<(), RendezvousError> {
    if rank < world_size { Ok(()) } else { Err(RendezvousError::RankTooLarge { name, rank, size_name, world_size }) }
}

/// The first name of a list such as `gpu[007-009,12],login1`.
fn first_machine(list: &str) -> Result<String, RendezvousError> {
    let unreadable = || RendezvousError::NodeList { list: list.to_owned() };
    let first = match list.split_once('[') {
        Some((before, rest)) if !before.contains(',') => {
            let (inside, after) = rest.split_once(']').ok_or_else(unreadable)?;
            let number = inside.split([',', '-']).next().unwrap_or_default();
            format!("{before}{number}{}", after.split(',').next().unwrap_or_default())
        }
        _ => list.split(',').next().unwrap_or_default().to_owned(),
    };
    if first.is_empty() || first.contains(['[', ']']) { Err(unreadable()) } else { Ok(first) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Result<Option<Rendezvous>, RendezvousError> {
        Rendezvous::from(&|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29400"),
    ];

    #[test]
    fn torchrun_says_who_is_who() {
        let place = found(&TORCHRUN).unwrap().unwrap();
        assert_eq!((place.rank, place.world_size, place.host.as_str(), place.port), (3, 4, "node7", 29400));
        assert_eq!(place.local, Some(LocalRank { rank: 1, world_size: 2 }));
        assert!(!place.serves_store && !place.is_of_one_machine());
    }

    #[test]
    fn rank_0_serves_the_store_unless_torchrun_does() {
        let mut variables = TORCHRUN.to_vec();
        variables[0].1 = "0";
        variables[2].1 = "0";
        assert!(found(&variables).unwrap().unwrap().serves_store);
        variables.extend([("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")]);
        let place = found(&variables).unwrap().unwrap();
        assert_eq!((place.serves_store, place.prefix.as_str()), (false, "medusa/2"));
    }

    #[test]
    fn processes_that_nproc_starts_find_each_other() {
        let variables = Rendezvous::variables_of_local(2, 3, 4711);
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let place = found(&variables).unwrap().unwrap();
        assert_eq!((place.rank, place.world_size, place.port, place.serves_store), (2, 3, 4711, false));
        assert!(place.is_of_one_machine());
    }

    #[test]
    fn srun_says_who_is_who() {
        let step = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "16"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[007-009],login1"),
            ("SLURM_JOB_ID", "1234567"),
        ];
        let place = found(&step).unwrap().unwrap();
        assert_eq!((place.host.as_str(), place.port, place.serves_store), ("gpu007", 24_567, true));
    }

    /// `export WORLD_SIZE=$SLURM_NTASKS` in a batch script names the same number.
    #[test]
    fn a_world_size_beside_sruns_tasks_is_theirs_or_a_contradiction() {
        let step = |size: &'static str| {
            let step = [
                ("SLURM_PROCID", "2"),
                ("SLURM_STEP_NUM_TASKS", "8"),
                ("SLURM_STEP_NODELIST", "a"),
                ("SLURM_JOB_ID", "7"),
            ];
            found(&[step.to_vec(), vec![("WORLD_SIZE", size)]].concat())
        };
        let place = step("8").unwrap().unwrap();
        assert_eq!((place.rank, place.world_size), (2, 8));
        for (text, size) in [("1", 1), ("16", 16)] {
            assert_eq!(step(text), Err(RendezvousError::OtherTasks { size, tasks: 8 }));
        }
    }

    /// srun starts torchrun once on each machine.
    #[test]
    fn torchruns_variables_win_over_those_of_srun() {
        let variables = [&TORCHRUN[..], &[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]].concat();
        assert_eq!(found(&variables), found(&TORCHRUN));
    }

    #[test]
    fn one_process_is_no_run_of_several() {
        for variables in [
            vec![],
            vec![("WORLD_SIZE", "1")],
            vec![("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")], // a batch script, not yet srun
            vec![("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")],
            vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")],
            vec![("RANK", "0"), ("WORLD_SIZE", "1")], // no store is needed
            vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8")],
            vec![("WORLD_SIZE", "1"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")],
        ] {
            assert_eq!(found(&variables), Ok(None), "{variables:?}");
        }
    }

    #[test]
    fn contradictions_are_reported() {
        let message = |variables: &[(&str, &str)]| found(variables).unwrap_err().to_string();
        assert!(message(&[("RANK", "1")]).contains("WORLD_SIZE is not"));
        assert!(message(&[("WORLD_SIZE", "2")]).contains("RANK is not"));
        assert!(message(&TORCHRUN[..4]).contains("MASTER_ADDR is not"));
        let mut variables = TORCHRUN.to_vec();
        variables[0].1 = "4";
        assert_eq!(message(&variables), "RANK is 4, but WORLD_SIZE is 4: ranks go from 0 to WORLD_SIZE - 1");
        variables[0].1 = "x";
        assert!(message(&variables).contains("in RANK, got \"x\""));
    }

    #[test]
    fn the_first_machine_of_a_list() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("gpu[3,5-9]", "gpu3"),
            ("gpu[003-010]-ib,x", "gpu003-ib"),
            ("login,gpu[1-2]", "login"),
        ] {
            assert_eq!(first_machine(list).as_deref(), Ok(first), "{list}");
        }
        assert!(first_machine("gpu[1-").is_err() && first_machine("").is_err());
    }
}
