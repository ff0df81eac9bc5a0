package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

const holders = "/state/holders"

func newHolder(key string, claims ...HolderClaim) Holder {
	return Holder{Key: key, GPUs: []string{gpu0}, State: Applied, BootID: "boot-1",
		Step: Step{Kind: "time-slice", Params: json.RawMessage(`{"want":3}`)}, Claims: claims}
}

func TestHolderRoundTrip(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	h := newHolder("a_time-slice", HolderClaim{UID: uid, Namespace: "default", Name: "one"}, HolderClaim{UID: "other"})
	if err := s.SaveHolder(h); err != nil {
		t.Fatal(err)
	}
	disk.PowerCut()
	got, found, err := s.Holder(h.Key)
	if err != nil || !found {
		t.Fatal(found, err)
	}
	if diff := cmp.Diff(h, got, cmp.AllowUnexported(Holder{}, HolderClaim{}, Step{})); diff != "" {
		t.Error(diff)
	}
	if !got.HeldBy(uid) || got.HeldBy("none") || len(got.Others(uid)) != 1 || got.Others(uid)[0].UID != "other" {
		t.Errorf("%+v", got.Claims)
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

func TestHolderPreservesUnknownFields(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	payload := `{"key":"k","gpus":["` + gpu0 + `"],"state":"Applied","bootID":"b","step":{"kind":"x","params":{"later":1},"later":2},` +
		`"claims":[{"uid":"u","namespace":"n","name":"c","later":3}],"later":{"a":[1,2]}}`
	path := filepath.Join(holders, "k.json")
	disk.Put(path, fmt.Appendf(nil, `{"formatVersion":1,"checksum":%q,"payload":%s}`, checksum([]byte(payload)), payload))
	h, found, err := s.Holder("k")
	if err != nil || !found {
		t.Fatal(found, err)
	}
	h.Claims = append(h.Others("another"), HolderClaim{UID: "v"})
	if err := s.SaveHolder(h); err != nil {
		t.Fatal(err)
	}
	raw, err := disk.ReadFile(path)
	for _, kept := range []string{`"later":{"a":[1,2]}`, `{"later":1}`, `"later":2`, `"later":3`} {
		if err != nil || strings.Count(string(raw), kept) != 1 {
			t.Errorf("%s is not kept: %s, %v", kept, raw, err)
		}
	}
}

func TestUnreadableHolderIsFoundAndQuarantined(t *testing.T) {
	sealed := func(payload string) string {
		return fmt.Sprintf(`{"formatVersion":1,"checksum":%q,"payload":%s}`, checksum([]byte(payload)), payload)
	}
	for name, content := range map[string]string{"empty": "", "half": `{"formatVersion":1`, "no checksum": `{"formatVersion":1,"payload":{}}`,
		"another key": sealed(`{"key":"other"}`), "wrong type": sealed(`[]`)} {
		t.Run(name, func(t *testing.T) {
			disk := durabletest.New()
			s := open(t, disk)
			disk.Put(filepath.Join(holders, "k.json"), []byte(content))
			_, found, err := s.Holder("k")
			var unreadable *UnreadableError
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
	disk := durabletest.New()
	s := open(t, disk)
	disk.Put(filepath.Join(holders, "k.json"), []byte(`{"formatVersion":99}`))
	var future *FutureError
	if _, found, err := s.Holder("k"); !found || !errors.As(err, &future) {
		t.Error(found, err)
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
