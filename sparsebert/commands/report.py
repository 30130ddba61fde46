""""""

from ..analysis.tables import print_tables, read_runs


def main(folders):
    if not folders or str(folders[0]).startswith("-"):
        raise ValueError("expected the output folders of pretrain.py or finetune.py")
    runs = read_runs(folders)
    print_tables(runs)
    for folder in runs:
        for picture in sorted(folder.glob("*.png")):
            print(f"picture: {picture}")
