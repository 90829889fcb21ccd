from ltc.utils.checkpoint_tagger import CheckpointTagger


def test_173_a_path_is_removed_when_it_loses_its_last_tag():
    removed = []
    tagger = CheckpointTagger(removed.append)
    tagger.tag("latest", "a")
    tagger.tag("best", "a")
    tagger.tag("latest", "b")
    assert removed == []
    tagger.tag("best", "b")
    assert removed == ["a"]
    assert tagger.tags() == {"latest": "b", "best": "b"}


def test_173_tagging_a_path_again_removes_nothing():
    removed = []
    tagger = CheckpointTagger(removed.append)
    tagger.tag("latest", "a")
    tagger.tag("latest", "a")
    assert removed == []


def test_173_tags_survive_json():
    tagger = CheckpointTagger()
    tagger.tag("latest", "a")
    removed = []
    again = CheckpointTagger.load_from_json(tagger.save_to_json(), removed.append)
    assert again.tags() == {"latest": "a"}
    again.tag("latest", "b")
    assert removed == ["a"]


def test_tags_are_a_copy():
    tagger = CheckpointTagger()
    tagger.tag("latest", "a")
    tagger.tags()["latest"] = "b"
    assert tagger.tags() == {"latest": "a"}
