"""Runs Python's own client of the Hugging Face Hub for tests/hub.rs: `download REPO` prints the snapshot's folder, `upload REPO FOLDER` the commit.

HF_ENDPOINT and HF_HOME select the Hub and the cache.
"""

import sys

from huggingface_hub import create_repo, snapshot_download, upload_folder

match sys.argv[1:]:
    case ["download", repo]:
        print(snapshot_download(repo))
    case ["upload", repo, folder]:
        create_repo(repo, private=True, exist_ok=True)
        print(upload_folder(repo_id=repo, folder_path=folder).oid)
    case other:
        sys.exit(f"unknown arguments {other}")
