package model

// Place is where a GPU instance of a profile lies, or could lie.
type Place struct {
	Profile, Start uint32
}

// engineCount has the number of engines of each kind, in this order: copy, decode, encode, JPEG and
// OFA engines.
type engineCount [5]uint32

func enginesOf(p Profile) engineCount {
	return engineCount{p.CopyEngines, p.Decoders, p.Encoders, p.JPEGEngines, p.OFAEngines}
}

// Profile returns the GPU instance profile with this ID. The second result is false if there is
// none.
func (m *MIG) Profile(id uint32) (Profile, bool) {
	for _, p := range m.Profiles {
		if p.ID == id {
			return p, true
		}
	}
	return Profile{}, false
}

// Holds reports whether the GPU can have these GPU instances at the same time. It cannot if two
// share a memory slice, if they need more engines than the largest profile has, or if they exceed
// the maximum number of instances of a profile or of the GPU.
func (m *MIG) Holds(places ...Place) bool {
	var whole, used engineCount
	for _, p := range m.Profiles {
		for i, n := range enginesOf(p) {
			whole[i] = max(whole[i], n)
		}
	}
	var memory uint64
	count := map[uint32]uint32{}
	for _, place := range places {
		p, known := m.Profile(place.Profile)
		slices := (uint64(1)<<p.Placements.Size - 1) << place.Start
		if !known || memory&slices != 0 {
			return false
		}
		memory |= slices
		for i, n := range enginesOf(p) {
			if used[i] += n; used[i] > whole[i] {
				return false
			}
		}
		if count[p.ID]++; count[p.ID] > p.InstancesMax {
			return false
		}
	}
	return len(places) <= int(m.MaxInstances.Value)
}
