//! The kernels' sources, as they lie in the binary.

/// A file of `kernels/`: its name and its text.
pub type Source = (&'static str, &'static str);

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../kernels/", $name)))),*]
    };
}

/// What is compiled, each to a module of its own.
pub const KERNELS: &[Source] = files![
    "attention.cu",
    "attention_backward.cu",
    "embedding.cu",
    "loss.cu",
    "max_sim.cu",
    "norm.cu",
    "optimizer.cu",
    "pointwise.cu",
    "pooling.cu",
    "state_attention.cu",
    "sums.cu",
    "xtr.cu",
];

/// What they include.
pub const HEADERS: &[Source] =
    files!["activation.h", "attention.h", "common.h", "functions.h", "max_sim.h", "random.h", "rows.h",];

/// The names of the kernels that a file declares: `KERNEL(threads, name, ...)` at the beginning of a line.
pub fn declared(source: &'static str) -> Vec<&'static str> {
    let name = |line: &'static str| line.strip_prefix("KERNEL(")?.split(',').nth(1).map(str::trim);
    source.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_in_the_binary() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let found = |ending: &str| {
            let names =
                std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> =
                names.filter(|n| n.ends_with(ending) && !n.starts_with("host.")).collect();
            names.sort();
            names
        };
        let names = |files: &[Source]| files.iter().map(|f| f.0.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(KERNELS), found(".cu"));
        assert_eq!(names(HEADERS), found(".h"));
        assert!(KERNELS.iter().all(|(_, text)| !declared(text).is_empty()));
    }
}
