//! The drafters that `bench` compares, each with its tree.

use std::num::NonZeroUsize;

use super::args::BenchArgs;
use super::setting::BenchSetting;
use crate::cli::UsageError;
use crate::cli::run_heads::check_calibration;
use crate::formats::calibration::Calibration;
use crate::formats::run_folder::CALIBRATION;
use crate::session::drafter::plan::{DrafterPlan, PlannedTree};
use crate::session::drafter::spec::{DrafterName, DrafterSpec};
use crate::tree::guess_tree::GuessTree;

/// The rows of a comparison, in order: `None` is plain decoding's own.
pub(super) type Rows = Vec<Option<DrafterPlan>>;

/// The drafters of `--drafters`, or the one of `--drafter` and `--heads`.
///
/// # Errors
/// [`UsageError`] for conflicting flags; heads or trees that cannot be read.
pub(super) fn rows(args: &BenchArgs) -> anyhow::Result<Rows> {
    let (heads, tree) = (args.heads.as_deref(), args.tree.as_deref());
    if args.drafters.is_empty() {
        return Ok(vec![args.drafter.plan(heads, tree)?]);
    }
    check_list(args)?;
    let inline = tree.filter(|tree| PlannedTree::is_inline(tree));
    let row = |spec: &DrafterSpec| {
        let plan = match spec.heads_path() {
            _ if spec.is(DrafterName::Plain) => return Ok(None),
            None if spec.heads().is_some() => DrafterPlan::new(Some(spec), heads, tree)?,
            Some(_) => DrafterPlan::new(Some(spec), None, inline)?,
            None => DrafterPlan::new(Some(spec), None, inline.filter(|_| spec.has_model()))?,
        };
        let drafts_tokens = |plan: DrafterPlan| match plan.models.is_empty() {
            true => Ok(plan),
            false => plan.with_draft_tokens(args.drafter.draft_tokens),
        };
        Ok(plan.map(drafts_tokens).transpose()?)
    };
    args.drafters.iter().map(row).collect()
}

fn check_list(args: &BenchArgs) -> Result<(), UsageError> {
    let refused = |why: String| Err(UsageError(why));
    let (drafters, plain) = (&args.drafters, DrafterSpec::of(DrafterName::Plain));
    if let Some(twice) = drafters.iter().enumerate().find_map(|(at, one)| drafters[..at].contains(one).then_some(one)) {
        return refused(format!("--drafters names {twice} twice"));
    }
    if drafters.iter().all(|spec| *spec == plain) {
        return refused("--drafters plain has nothing to compare plain decoding with; add a drafter".into());
    }
    if args.drafter.draft_tokens.is_some() && !drafters.iter().any(DrafterSpec::has_model) {
        return refused("--draft-tokens needs a drafter model:PATH".into());
    }
    check_used(args)
}

/// Refuses heads and a tree that no drafter of the list takes; `dynamic:N` is for all heads and draft models.
fn check_used(args: &BenchArgs) -> Result<(), UsageError> {
    let any_tree = args.drafters.iter().any(|spec| spec.heads().is_some() || spec.has_model());
    let tree = args.tree.as_deref().filter(|tree| !any_tree || !PlannedTree::is_inline(tree));
    let uses_flags = args.drafters.iter().any(|spec| spec.heads().is_some_and(|part| part.path.is_none()));
    match [("--heads", args.heads.as_deref()), ("--tree", tree)].into_iter().find(|(_, path)| path.is_some()) {
        Some((flag, Some(path))) if !uses_flags => Err(UsageError(format!(
            "no drafter of --drafters uses {flag} {}; name one without a path, such as medusa",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// The searched tree of every drafter in every setting; `None` where the drafter keeps its own.
///
/// # Errors
/// [`UsageError`] if heads have no calibration, or it has no tree of that size.
pub(super) fn searched_trees(
    args: &BenchArgs,
    settings: &[BenchSetting],
    rows: &Rows,
) -> anyhow::Result<Vec<Vec<Option<GuessTree>>>> {
    let plans: Vec<&DrafterPlan> = rows.iter().flatten().collect();
    let Some(flag) = args.nodes_flag() else { return Ok(settings.iter().map(|_| vec![None; plans.len()]).collect()) };
    let calibrations = plans.iter().map(|plan| calibration(args, flag, plan)).collect::<anyhow::Result<Vec<_>>>()?;
    let tree = |nodes: NonZeroUsize, calibration: &Option<Calibration>| {
        let Some(calibration) = calibration else { return Ok(None) };
        let found = calibration.best_tree(nodes.get(), calibration.heads.len());
        found
            .map(|found| Some(GuessTree::Static(found.tree)))
            .map_err(|why| UsageError(format!("{flag}={nodes}: {why}")))
    };
    let trees_for = |setting: &BenchSetting| -> Result<Vec<_>, UsageError> {
        calibrations
            .iter()
            .map(|calibration| setting.nodes.map_or(Ok(None), |nodes| tree(nodes, calibration)))
            .collect()
    };
    Ok(settings.iter().map(trees_for).collect::<Result<_, _>>()?)
}

/// `--calibration` is that of `--heads`, or of the only heads; others have theirs beside them. `None` for a drafter without heads.
fn calibration(args: &BenchArgs, flag: &str, plan: &DrafterPlan) -> anyhow::Result<Option<Calibration>> {
    let Some(heads) = &plan.heads else { return Ok(None) };
    let is_named = plan.spec.heads_path().is_none() || args.drafters.len() < 2;
    let path = args.calibration.clone().filter(|_| is_named).or_else(|| heads.beside(CALIBRATION));
    let Some(path) = path else {
        let why = match is_named {
            true => format!(
                "{flag}=… searches a tree of each size: give it --calibration C, which `medusa calibrate` writes"
            ),
            false => format!(
                "{flag}=… searches a tree of each size: {} has no {CALIBRATION} beside it; `medusa calibrate` writes it",
                heads.path.display()
            ),
        };
        return Err(UsageError(why).into());
    };
    let calibration = Calibration::load(&path)?;
    check_calibration(&calibration, &path, heads)?;
    Ok(Some(calibration))
}
