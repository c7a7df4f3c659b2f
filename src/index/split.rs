//! Cutting a node in two.

use super::node::{Column, Node, NodeId};
use super::tree::Tree;

impl Tree {
    /// Cuts a node in two: what comes before `at` becomes a node of its own, the rest keeps the number.
    ///
    /// No word moves. Readers see the whole edge, or the two: the rest is there under its new key before
    /// the old key says that the edge is shorter.
    pub(super) fn split(&mut self, id: NodeId, at: u16) -> NodeId {
        self.nodes[id].entries.iter().for_each(|entry| self.lanes.drop_node(entry.lane));
        let prefix = self.nodes[id].take_first(at);
        let parts = prefix.entries.iter().chain(&self.nodes[id].entries);
        parts.for_each(|entry| self.lanes.add_nodes(entry.lane, 1));
        let prefix_id = self.nodes.add(prefix);
        self.nodes.relink(id, prefix_id);
        self.nodes[prefix_id].first_child = id;
        let first = self.arena.word(self.nodes[id].locals.base);
        let node = &mut self.nodes[id];
        node.first = first;
        (node.parent, node.next, node.previous) = (prefix_id, NodeId::NONE, NodeId::NONE);
        for column in self.nodes[prefix_id].columns.clone() {
            if column.len == at && column.names.room == at {
                self.own(&column.names, column.names.base + u32::from(at), prefix_id);
            } else {
                self.own_all(&column.names, prefix_id);
            }
        }
        self.drop_unused_columns(id);
        self.drop_unused_columns(prefix_id);
        self.insert(id);
        let header = self.header(prefix_id);
        let line = self.line(prefix_id).expect("the whole edge is still there");
        self.table.update(line, &header);
        if self.sweeping {
            self.unswept.push(prefix_id);
        }
        prefix_id
    }
}

impl Node {
    /// Takes the first `at` blocks off: words, names and what is covered of them, as a node in its place.
    fn take_first(&mut self, at: u16) -> Self {
        let mut prefix = Self {
            parent: self.parent,
            depth: self.depth,
            first: self.first,
            line: self.line,
            len: at,
            written: at,
            initial: at.min(self.initial),
            variant: self.variant,
            forks: self.forks,
            used: true,
            ..Self::EMPTY
        };
        let rest = self.locals.split_off(at);
        prefix.locals = std::mem::replace(&mut self.locals, rest);
        let goes_on = self.split_columns(&mut prefix);
        self.split_entries(&mut prefix, &goes_on);
        self.len -= at;
        self.written -= at;
        self.initial = self.initial.saturating_sub(at);
        self.depth += u32::from(at);
        (self.variant, self.forks) = (0, 0);
        prefix
    }

    /// Cuts every column; returns which of the columns left each goes on in, if it does.
    fn split_columns(&mut self, prefix: &mut Self) -> Vec<Option<u16>> {
        let at = prefix.len;
        let columns = std::mem::take(&mut self.columns);
        let cut = columns.into_iter().map(|column| {
            let mut low = Column { users: 0, ..column };
            let high = (column.len > at).then(|| {
                let high = Column { names: low.names.split_off(at), len: column.len - at, users: 0, ..column };
                low.len = at;
                self.columns.push(high);
                (self.columns.len() - 1) as u16
            });
            prefix.columns.push(low);
            high
        });
        cut.collect()
    }

    /// Cuts every entry. In what is left an entry stays that covers something, or whose worker may have
    /// blocks below; before it, one that covers something or stays in what is left.
    fn split_entries(&mut self, prefix: &mut Self, goes_on: &[Option<u16>]) {
        let (at, len) = (prefix.len, self.len);
        let has_children = self.has_children();
        for mut low in std::mem::take(&mut self.entries) {
            let mut high = low.split_off(at);
            let column = usize::from(low.column);
            let below = goes_on[column].filter(|to| has_children && self.columns[usize::from(*to)].len == len - at);
            let kept = if high.is_empty() { below } else { goes_on[column] };
            if let Some(to) = kept {
                high.column = to;
                self.columns[usize::from(to)].users += 1;
                self.entries.push(high);
            }
            if kept.is_some() || !low.is_empty() {
                prefix.columns[column].users += 1;
                prefix.entries.push(low);
            }
        }
    }
}
