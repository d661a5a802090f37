//! Checks that a resumed run matches its `provenance.json`.

use serde_json::{Value, json};

use crate::data::LoadReport;
use crate::formats::provenance::{HashedFile, Provenance, StampedFiles};
use crate::plural::counted;

impl Provenance {
    /// Why a run that began as `self` cannot continue as `now`, as the end of a sentence. Files may have moved.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        self.other_backbone(now)
            .or_else(|| self.other_beginning(now))
            .or_else(|| self.other_flag(now))
            .or_else(|| {
                let file = changed(&self.data, &now.data)?;
                Some(format!(
                    "holds a run on other data: {file} changed since it began; a resumed run must see the same rows"
                ))
            })
            .or_else(|| self.other_states(now))
            .or_else(|| self.other_making(now))
            .or_else(|| self.other_split(now.split_by_prompt))
    }

    fn other_states(&self, now: &Self) -> Option<String> {
        let (before, now) = (self.hidden_states.as_ref()?, now.hidden_states.as_ref()?);
        let sizes = |of: &StampedFiles| format!("{} with {} bytes", counted(of.files, "file"), of.bytes);
        (before != now).then(|| {
            format!(
                "holds a run on other hidden states: {} when it began and {} now; names, sizes and times of change must be the same (copy \
                 such files with their times: cp -p, rsync -a)",
                sizes(before), sizes(now)
            )
        })
    }

    fn other_backbone(&self, now: &Self) -> Option<String> {
        if let (Some(before), Some(now)) = (&self.backbone, &now.backbone)
            && before != now
        {
            let (id, commit, now) = (&before.id, &before.commit, &now.commit);
            return Some(format!(
                "holds a run on {id} at commit {commit}, and that is {now} by now; resume it with HF_HUB_OFFLINE=1, or train in another \
                 folder (backbone.path = \"{id}@{commit}\" stays at that commit)"
            ));
        }
        let is_of_one_kind = self.backbone.is_some() == now.backbone.is_some() && !self.backbone_files.is_empty();
        let file = changed(&self.backbone_files, &now.backbone_files).filter(|_| is_of_one_kind)?;
        Some(format!(
            "holds a run on another backbone: {file} changed since it began; go on with the same files, or train in another folder"
        ))
    }

    /// Compared by content, not by origin: another commit of a repository may have the same heads.
    fn other_beginning(&self, now: &Self) -> Option<String> {
        let is_recorded = !self.init_from_files.is_empty(); // earlier versions do not record it
        let file = changed(&self.init_from_files, &now.init_from_files).filter(|_| is_recorded)?;
        Some(format!(
            "holds a run that began with other heads or adapters: {file} changed since (init_from); go on with the same files, or \
             train in another folder"
        ))
    }

    fn other_flag(&self, now: &Self) -> Option<String> {
        let with = if self.skip_bad_rows { "with" } else { "without" };
        let other = self.skip_bad_rows != now.skip_bad_rows;
        other.then(|| {
            format!(
                "holds a run that began {with} --skip-bad-rows; a resumed run must see the same rows: resume it {with} the flag"
            )
        })
    }

    /// The same files may produce other rows: with another version of this program, or with a chat template that writes
    /// the date.
    fn other_making(&self, now: &Self) -> Option<String> {
        let other = self.other_rows(&now.rows)?;
        let is_unhashed = |file: &Value| file["sha256"].is_null();
        let mut files = now.rows.iter().filter_map(|rows| rows["files"].as_array()).flatten();
        let reason = if files.any(is_unhashed) { "a file changed, or" } else { "of the same files:" };
        Some(format!(
            "holds a run on other {other}, {reason} another version of this program made them, or a chat template that writes the date; \
             train in another folder"
        ))
    }

    /// Checks that rows read now are those of the run.
    ///
    /// # Errors
    /// The difference: "rows to train on: …".
    pub fn check_rows<'r>(&self, now: impl Iterator<Item = &'r LoadReport>) -> Result<(), String> {
        self.other_rows(&now.map(|report| json!(report)).collect::<Vec<_>>()).map_or(Ok(()), Err)
    }

    /// Why the rows that a run held out are not those that this version holds out.
    pub fn other_split(&self, by_prompt: bool) -> Option<String> {
        (self.split_by_prompt != by_prompt).then(|| {
            "holds a run that held out rows one by one, although others ask the same; this version holds them out together: train in another folder, or \
             go on with the version that began it"
                .to_owned()
        })
    }

    fn other_rows(&self, now: &[Value]) -> Option<String> {
        let same = |before: &Value, now: &Value| before.is_null() || before == now;
        let change = |what: &str, before: &Value, now: &Value| {
            let number = ["rows", "tokens", "tokens_with_loss"].into_iter().find(|key| !same(&before[key], &now[key]));
            let difference = match number {
                Some(key) => format!("{key} was {} when it began and is {} now", before[key], now[key]),
                None => format!("the tokens of {} are others now", other_tokens(before, now)?),
            };
            Some(format!("rows to {what}: {difference}"))
        };
        let pairs = ["train on", "validate on"].into_iter().zip(self.rows.iter().zip(now));
        pairs.into_iter().find_map(|(what, (before, now))| change(what, before, now))
    }
}

/// The first file whose tokens differ from those at the start of the run.
fn other_tokens(before: &Value, now: &Value) -> Option<String> {
    let files = |report: &Value| report["files"].as_array().cloned().unwrap_or_default();
    let (before, now) = (files(before), files(now));
    let mut pairs = before.iter().zip(&now);
    let is_other = |(before, now): &(&Value, &Value)| {
        !before["tokens_sha256"].is_null() && before["tokens_sha256"] != now["tokens_sha256"]
    };
    let (_, now) = pairs.find(is_other)?;
    Some(now["path"].as_str().unwrap_or_default().to_owned())
}

/// The first file that is in one list only, or another difference between the lists.
fn changed(before: &[HashedFile], now: &[HashedFile]) -> Option<String> {
    let hashes = |files: &[HashedFile]| files.iter().map(|file| file.sha256.clone()).collect::<Vec<_>>();
    let only_in = |one: &[HashedFile], other: &[HashedFile]| {
        let other = hashes(other);
        one.iter().find(|file| !other.contains(&file.sha256)).map(|file| file.path.display().to_string())
    };
    let file = only_in(now, before).or_else(|| only_in(before, now));
    file.or_else(|| (hashes(before) != hashes(now)).then(|| "the order of the files".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provenance(data: &[(&str, &str)], rows: Value) -> Provenance {
        let file = |&(path, sha256): &(&str, &str)| HashedFile { path: path.into(), sha256: sha256.into() };
        let data: Vec<HashedFile> = data.iter().map(file).collect();
        let text = json!({"program": "", "git_revision": "", "libtorch": "", "device": "", "threads": 1, "command": [],
            "started": "", "data": data, "rows": [rows]});
        serde_json::from_value(text).unwrap()
    }

    fn difference(before: &Provenance, now: &Provenance) -> String {
        before.difference(now).unwrap_or_default()
    }

    #[test]
    fn a_file_is_its_content_wherever_it_lies() {
        let before = provenance(&[("a", "1"), ("b", "2")], json!({}));
        let now = |data| difference(&before, &provenance(data, json!({})));
        assert_eq!(now(&[("elsewhere/a", "1"), ("b", "2")]), "");
        assert!(now(&[("a", "1"), ("b", "3")]).contains("b changed since"));
        assert!(now(&[("a", "1")]).contains("b changed since"));
        assert!(now(&[("b", "2"), ("a", "1")]).contains("the order of the files changed"));
    }

    #[test]
    fn a_run_that_split_by_rows_does_not_go_on_where_prompts_are_split() {
        let before = provenance(&[], json!({}));
        let now = |split_by_prompt| Provenance { split_by_prompt, ..provenance(&[], json!({})) };
        assert_eq!(difference(&before, &now(false)), "");
        assert!(difference(&before, &now(true)).contains("held out rows one by one"));
        assert_eq!(difference(&now(true), &now(true)), "");
    }

    #[test]
    fn a_run_goes_on_from_the_heads_that_it_began_with() {
        let with = |init_from: &[(&str, &str)]| {
            let mut provenance = provenance(&[], json!({}));
            let file = |&(path, sha256): &(&str, &str)| HashedFile { path: path.into(), sha256: sha256.into() };
            provenance.init_from_files = init_from.iter().map(file).collect();
            provenance
        };
        let before = with(&[("heads", "1"), ("adapter", "2")]);
        assert_eq!(difference(&before, &with(&[("elsewhere", "1"), ("adapter", "2")])), "");
        let other = difference(&before, &with(&[("heads", "1"), ("adapter", "3")]));
        assert!(other.contains("adapter changed since (init_from)"), "{other}");
        assert_eq!(difference(&with(&[]), &before), "", "a run of an earlier version");
    }

    #[test]
    fn other_numbers_and_other_tokens_of_the_same_files_are_reported() {
        let rows = |tokens: usize, sha256: &str| json!({"rows": 3, "tokens": tokens, "files": [{"path": "a", "tokens_sha256": sha256}]});
        let before = provenance(&[], rows(40, "x"));
        let now = |rows| difference(&before, &provenance(&[], rows));
        assert_eq!(now(rows(40, "x")), "");
        assert!(now(rows(41, "x")).contains("rows to train on: tokens was 40 when it began and is 41 now"));
        let other_day = now(rows(40, "y"));
        assert!(other_day.contains("the tokens of a are others now") && other_day.contains("the date"), "{other_day}");
        assert_eq!(difference(&provenance(&[], json!({})), &before), "", "a run of an earlier version");
    }
}
