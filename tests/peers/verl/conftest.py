"""OpenRLHF's imports work in the tests here."""

import stand_ins

stand_ins.install(*stand_ins.OF_OPENRLHF)
