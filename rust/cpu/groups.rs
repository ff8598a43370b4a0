//! How a step's rows are taken together in products: groups of nearly equal height, each read by one pass.

/// A division of `rows` rows into groups of at most `max_height`, as even as can be.
///
/// The input of a product lies in *group order*: group after group, in each the rows' values for the first input, then
/// those for the second, and so on. How rows are grouped changes no bit of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    rows: usize,
    count: usize,
}

/// A group: rows `first` to `first + height`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub first: usize,
    pub height: usize,
}

impl Groups {
    pub(crate) fn new(rows: usize, max_height: usize) -> Self {
        Self { rows, count: rows.div_ceil(max_height) }
    }

    pub(crate) fn count(self) -> usize {
        self.count
    }

    /// The first `rows % count` groups are higher by one.
    pub(crate) fn get(self, index: usize) -> Group {
        let (height, higher) = (self.rows / self.count, self.rows % self.count);
        Group { first: index * height + index.min(higher), height: height + usize::from(index < higher) }
    }

    /// The group of `row`.
    pub(crate) fn of_row(self, row: usize) -> Group {
        let (height, higher) = (self.rows / self.count, self.rows % self.count);
        let in_higher = higher * (height + 1);
        if row < in_higher { self.get(row / (height + 1)) } else { self.get(higher + (row - in_higher) / height) }
    }

    /// Where row `row` of a buffer in group order has its first value, and how far apart its values are.
    pub(crate) fn place(self, row: usize, width: usize) -> (usize, usize) {
        let group = self.of_row(row);
        (group.first * width + (row - group.first), group.height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_even_and_cover_each_row_once() {
        for max_height in [1, 6, 12] {
            for rows in 1..200 {
                let groups = Groups::new(rows, max_height);
                let mut next = 0;
                let mut places = vec![false; rows * 3];
                for index in 0..groups.count() {
                    let group = groups.get(index);
                    assert_eq!(group.first, next);
                    assert!((1..=max_height).contains(&group.height));
                    assert!(groups.get(0).height - group.height <= 1);
                    for row in group.first..group.first + group.height {
                        assert_eq!(groups.of_row(row), group);
                        let (first, stride) = groups.place(row, 3);
                        for input in 0..3 {
                            assert!(!std::mem::replace(&mut places[first + input * stride], true));
                        }
                    }
                    next += group.height;
                }
                assert_eq!(next, rows);
                assert!(places.into_iter().all(|taken| taken));
            }
        }
    }
}
