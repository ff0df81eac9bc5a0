package prepare_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// SharedDevices must report all devices of which claims have shares, even if records are
// unreadable, because the driver publishes the further shares of a device according to this result.
func TestSharedDevicesSurvivesUnreadableRecords(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			want := map[string]bool{}
			known := func(when string) {
				t.Helper()
				if got, err := p.SharedDevices(); err != nil || !maps.Equal(got, want) {
					t.Errorf("%s: held are %v (%v), want %v", when, got, err, want)
				}
			}
			known("before")
			for _, c := range s.claims {
				mustPrepare(t, p, c)
				for _, r := range c.Status.Allocation.Devices.Results {
					if name, ok := device.ParseName(r.Device); ok && name.Share {
						_, want[r.Device] = r.ConsumedCapacity[device.CapacityMemory]
					}
				}
				w.scan()
				known("while held")
			}
			for _, c := range s.claims {
				w.disk.Put(recordFile(t, w, string(c.UID)), []byte("{"))
				known("with unreadable records")
			}
			for _, c := range s.claims {
				mustUnprepare(t, p, c.UID)
			}
			clear(want)
			known("afterwards")
		})
	}
}
