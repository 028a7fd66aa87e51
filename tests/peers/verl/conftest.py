"""OpenRLHF's imports work in these tests."""

import stand_ins

stand_ins.install(*stand_ins.OF_OPENRLHF)
