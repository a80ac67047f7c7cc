//! Environments and options in short, for tests.

use crate::assignment::{self, Assignment};
use crate::credentials::Credentials;
use crate::error::Result;
use crate::options::Options;
use crate::variables::Variables;

/// `options` as `rank=1 size=3`, `variables` as `RANK=1 WORLD_SIZE=3`.
pub(crate) fn assign(options: &str, variables: &str) -> Result<Option<Assignment>> {
    let pairs =
        |text: &str| text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).map(owned).collect();
    let owned_options: Vec<(String, String)> = pairs(options);
    let mut options = Options::default();
    for (name, value) in owned_options {
        match name.as_str() {
            "rank" => options.rank = Some(value.parse().unwrap()),
            "size" => options.size = Some(value.parse().unwrap()),
            "coordinator" => options.coordinator = Some(value),
            "cluster_file" => options.cluster_file = Some(value.into()),
            other => panic!("{other}"),
        }
    }
    let table: Vec<(String, String)> = pairs(variables);
    let look_up = |name: &str| table.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    assignment::assign(&options, &Variables::from_lookup(&look_up), Credentials::IdentityFile)
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// rank/size local rank/local size, address.
pub(crate) fn brief(assignment: Option<Assignment>) -> String {
    let Some(assignment) = assignment else {
        return "alone".to_owned();
    };
    let Assignment { rank, size, local_rank, local_size, coordinator, .. } = assignment;
    let at = coordinator.map_or(String::new(), |address| format!(" {address}"));
    format!("{rank}/{size} {local_rank}/{local_size}{at}")
}
