package steps

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// Sharers says which claims share which settings, MPS daemons and partitions.
type Sharers struct {
	claims map[string][]checkpoint.ClaimRef // by key
	// unknown has the claims whose records cannot be used now. Each may share all that claims with its
	// devices can share.
	unknown []checkpoint.Entry
}

// ReadSharers reads the records of all claims with devices of these GPUs, or of all claims if gpus
// is empty. A claim shares what its record of this boot names, in whatever state the record is.
func ReadSharers(records *checkpoint.Store, bootID string, gpus []string) (Sharers, error) {
	s := Sharers{claims: map[string][]checkpoint.ClaimRef{}}
	among := func(e checkpoint.Entry) bool { return len(gpus) == 0 || slices.ContainsFunc(gpus, e.MayHave) }
	err := records.LoadAll(among,
		func(e checkpoint.Entry, r checkpoint.Record, found bool, err error) {
			if err != nil {
				s.unknown = append(s.unknown, e)
				return
			}
			if !found || r.BootID != bootID {
				return
			}
			for _, step := range r.Steps {
				shared := &Shared{}
				if step.Kind != SharedKind {
					continue
				}
				if json.Unmarshal(step.Params, shared) != nil {
					s.unknown = append(s.unknown, e)
					continue
				}
				s.claims[shared.Key] = append(s.claims[shared.Key], r.Claim())
			}
		})
	return s, cause.Wrap(cause.Record, err)
}

// Of returns the claims that share what the key names, or may share it.
func (s Sharers) Of(key string) []checkpoint.ClaimRef {
	claims := slices.Clone(s.claims[key])
	for _, e := range s.unknown {
		if mayShare(e, key) {
			claims = append(claims, checkpoint.ClaimRef{UID: e.ClaimUID})
		}
	}
	return claims
}

// mayShare reports whether the devices of the claim allow that it shares what the key names: a
// setting of its GPU, its partition, or the daemon of its device or of itself.
func mayShare(e checkpoint.Entry, key string) bool {
	of, _ := SplitKey(key)
	shared, isDevice := device.ParseName(of)
	if !isDevice || e.Inexact {
		return e.Inexact || strings.HasPrefix(of, string(e.ClaimUID)+"-")
	}
	return slices.ContainsFunc(e.Devices, func(d string) bool {
		name, known := device.ParseName(d)
		return !known || of == name.GPU || shared.Unshared().String() == name.Unshared().String()
	})
}
