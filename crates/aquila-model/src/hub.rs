//! Models of the Hugging Face hub: found in the local cache, or downloaded into it.

use std::path::{Path, PathBuf};

use crate::location::Download;

/// A checked `org/name`.
pub(crate) struct HubId<'a> {
    organization: &'a str,
    name: &'a str,
}

impl<'a> HubId<'a> {
    /// The id, if `text` has the form of one.
    pub fn parse(text: &'a str) -> Option<Self> {
        let (organization, name) = text.split_once('/')?;
        let fits = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        (fits(organization) && fits(name)).then_some(Self { organization, name })
    }

    /// The snapshot in a local cache, or why there is none.
    pub fn find(&self, cache: &Path) -> Result<PathBuf, String> {
        let folder = cache.join(format!("models--{}--{}", self.organization, self.name));
        let reference = folder.join("refs/main");
        if !folder.is_dir() {
            return Err(format!("the hub cache has no {}", folder.display()));
        }
        let commit = std::fs::read_to_string(&reference)
            .map_err(|e| format!("{}: {e}", reference.display()))?;
        let commit = commit.trim();
        if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(format!("{}: {commit:?} is no commit", reference.display()));
        }
        let snapshot = folder.join("snapshots").join(commit);
        if !snapshot.join("config.json").exists() {
            return Err(format!("{} has no config.json: incomplete", snapshot.display()));
        }
        Ok(snapshot)
    }

    /// Downloads the snapshot into a cache; answers its folder, or why there is none.
    #[cfg(not(feature = "hub"))]
    pub fn download(
        &self,
        _cache: Option<&Path>,
        _progress: &mut dyn FnMut(Download),
    ) -> Result<PathBuf, String> {
        Err("this build does not download (it lacks the feature hub)".into())
    }

    /// Downloads the snapshot into a cache; answers its folder, or why there is none.
    #[cfg(feature = "hub")]
    pub fn download(
        &self,
        cache: Option<&Path>,
        progress: &mut dyn FnMut(Download),
    ) -> Result<PathBuf, String> {
        let id = format!("{}/{}", self.organization, self.name);
        let failed = |e: &dyn std::fmt::Display| format!("downloading {id} failed: {e}");
        let mut builder = hf_hub::api::sync::ApiBuilder::from_env().with_progress(false);
        if let Some(cache) = cache {
            builder = builder.with_cache_dir(cache.to_owned());
        }
        let repository = builder.build().map_err(|e| failed(&e))?.model(id.clone());
        let info = repository.info().map_err(|e| failed(&e))?;
        // Folders and `consolidated*` hold the same weights once more, in other layouts.
        let ours = |file: &String| !file.contains('/') && !file.starts_with("consolidated");
        let mut files: Vec<String> =
            info.siblings.into_iter().map(|s| s.rfilename).filter(ours).collect();
        let has_safetensors = files.iter().any(|file| file.ends_with(".safetensors"));
        files.retain(|file| {
            [".safetensors", ".json", ".jinja"].iter().any(|end| file.ends_with(end))
                || !has_safetensors && crate::torch_file::is_weight_file(file)
        });
        // A snapshot counts as complete once its config is there, so that comes last.
        files.sort_by_key(|f| f == "config.json");
        let local = cache.map(|c| hf_hub::Cache::new(c.to_owned()).model(id.clone()));
        let mut last = None;
        for file in files {
            let present = local.as_ref().and_then(|cache| cache.get(&file));
            last = Some(match present {
                Some(path) => path,
                None => repository
                    .download_with_progress(
                        &file,
                        Report { progress, file: &file, done: 0, total: 0 },
                    )
                    .map_err(|e| failed(&format!("{file}: {e}")))?,
            });
        }
        match last.as_deref().and_then(Path::parent) {
            Some(folder) if folder.join("config.json").exists() => Ok(folder.to_owned()),
            _ => Err(failed(&"it has no config.json")),
        }
    }
}

/// Passes the hub's reports on.
#[cfg(feature = "hub")]
struct Report<'a> {
    progress: &'a mut dyn FnMut(Download),
    file: &'a str,
    done: u64,
    total: u64,
}

#[cfg(feature = "hub")]
impl hf_hub::api::Progress for Report<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        self.total = size as u64;
        self.update(0);
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        (self.progress)(Download {
            file: self.file.to_owned(),
            done_bytes: self.done,
            total_bytes: self.total,
        });
    }

    fn finish(&mut self) {}
}
