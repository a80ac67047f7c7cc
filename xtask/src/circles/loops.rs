//! Strongly connected components, by Tarjan's algorithm.

use std::collections::BTreeMap;

use super::arrows::Arrows;
use super::source::FileId;

/// Groups of two and more files each of which can be reached from each other one.
pub(crate) fn loops(files: usize, arrows: &Arrows) -> Vec<Vec<FileId>> {
    let mut search = Search {
        arrows,
        order: BTreeMap::new(),
        lowest: BTreeMap::new(),
        open: Vec::new(),
        found: Vec::new(),
    };
    for file in 0..files {
        if !search.order.contains_key(&file) {
            search.visit(file);
        }
    }
    search.found.retain(|group| group.len() > 1);
    search.found.iter_mut().for_each(|group| group.sort_unstable());
    search.found.sort_by_key(|group| (std::cmp::Reverse(group.len()), group[0]));
    search.found
}

struct Search<'a> {
    arrows: &'a Arrows,
    /// When each file was met.
    order: BTreeMap<FileId, usize>,
    /// The earliest open file that each file reaches.
    lowest: BTreeMap<FileId, usize>,
    /// Files whose group is not closed.
    open: Vec<FileId>,
    found: Vec<Vec<FileId>>,
}

impl Search<'_> {
    fn visit(&mut self, file: FileId) {
        let met = self.order.len();
        self.order.insert(file, met);
        self.lowest.insert(file, met);
        self.open.push(file);
        for &next in self.arrows.get(&file).into_iter().flat_map(BTreeMap::keys) {
            let reached = match self.order.get(&next) {
                None => {
                    self.visit(next);
                    self.lowest[&next]
                }
                Some(&met) if self.open.contains(&next) => met,
                Some(_) => continue,
            };
            let lowest = self.lowest[&file].min(reached);
            self.lowest.insert(file, lowest);
        }
        if self.lowest[&file] == met {
            let first = self.open.iter().position(|&open| open == file).unwrap_or(0);
            let group = self.open.split_off(first);
            self.found.push(group);
        }
    }
}
