package checkpoint

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const holders = "/state/holders"

func newHolder(key string) Holder {
	return Holder{Key: key, GPUs: []string{gpu0}, State: Applied, BootID: "boot-1",
		Step: Step{Kind: "time-slice", Params: json.RawMessage(`{"want":3}`)}}
}

func TestHolderRoundTrip(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	h := newHolder("a_time-slice")
	if err := s.SaveHolder(h); err != nil {
		t.Fatal(err)
	}
	disk.PowerCut()
	got, found, err := s.Holder(h.Key)
	if err != nil || !found {
		t.Fatal(found, err)
	}
	if diff := cmp.Diff(h, got); diff != "" {
		t.Error(diff)
	}
	if keys, err := s.Holders(); err != nil || !slices.Equal(keys, []string{h.Key}) {
		t.Error(keys, err)
	}
	for range 2 {
		if err := s.RemoveHolder(h.Key); err != nil {
			t.Fatal(err)
		}
	}
	disk.PowerCut()
	if _, found, err := s.Holder(h.Key); found || err != nil {
		t.Error(found, err)
	}
}

func TestUnreadableHolderIsFoundAndQuarantined(t *testing.T) {
	for name, content := range map[string]string{
		"empty": "", "half": `{"kind":"Holder"`, "no checksum": `{"kind":"Holder","version":1,"minReader":1,"payload":{}}`,
		"another key": string(sealed(t, holderFormat, newHolder("other"))), "wrong type": string(sealed(t, holderFormat, []string{})),
	} {
		t.Run(name, func(t *testing.T) {
			disk := durabletest.New()
			s := open(t, disk)
			disk.Put(filepath.Join(holders, "k.json"), []byte(content))
			_, found, err := s.Holder("k")
			var unreadable *statefile.UnreadableError
			if !found || !errors.As(err, &unreadable) || !strings.Contains(err.Error(), "k.json") {
				t.Errorf("%v, %v", found, err)
			}
			place, err := s.QuarantineHolder("k", time.Unix(0, 7))
			if err != nil || !strings.Contains(place, "holder-k-7") {
				t.Error(place, err)
			}
			disk.PowerCut()
			if keys, err := s.Holders(); err != nil || len(keys) != 0 {
				t.Error(keys, err)
			}
			if raw, err := disk.ReadFile(place); err != nil || string(raw) != content {
				t.Errorf("%q, %v", raw, err)
			}
		})
	}
}

func TestRemoveHolderRemovesUnfinishedWrites(t *testing.T) {
	for n := 1; n <= 3; n++ {
		disk := durabletest.New()
		s := open(t, disk)
		disk.StopAt(n)
		if err := s.SaveHolder(newHolder("k")); err == nil {
			t.Fatal("not interrupted")
		}
		disk.Restart()
		if err := s.SaveHolder(newHolder("k2")); err != nil {
			t.Fatal(err)
		}
		if err := s.RemoveHolder("k"); err != nil {
			t.Fatal(err)
		}
		if names := disk.Names(holders); !slices.Equal(names, []string{"k2.json"}) {
			t.Errorf("write %d: left %q", n, names)
		}
	}
}

func TestInvalidHolderKeyIsRefused(t *testing.T) {
	s := open(t, durabletest.New())
	for _, key := range []string{"", ".", "..", "../x", "a/b", ".tmp-x", strings.Repeat("x", 300)} {
		if err := s.SaveHolder(newHolder(key)); err == nil {
			t.Errorf("%q was saved", key)
		}
		if _, _, err := s.Holder(key); err == nil {
			t.Errorf("%q was read", key)
		}
		if err := s.RemoveHolder(key); err == nil {
			t.Errorf("%q was removed", key)
		}
	}
}
