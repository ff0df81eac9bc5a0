package health

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

var update = flag.Bool("update", false, "write the files of testdata: those of a released version never change")

// golden is a node's health file as version 0.1 wrote it.
const golden = "testdata/v0.1/health.json"

func TestHealthFileIsReadAndWrittenAsInVersion01(t *testing.T) {
	s, disk := newStore()
	if *update {
		w := newTestMonitor(t, nil)
		w.answerRecovery(device.RecoveryReset)
		w.sendXID(79)
		w.advance(time.Minute)
		w.sendXIDOn(64, 19, 1, 1)
		w.Validate(map[string]time.Time{uuid: w.now.Truncate(time.Second)})
		if err := s.Save(w.Monitor); err != nil {
			t.Fatal(err)
		}
		raw, err := disk.ReadFile(s.Path)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(golden), 0o755), os.WriteFile(golden, raw, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	disk.Put(s.Path, raw)
	now := start.Add(time.Hour)
	w := &testMonitor{Monitor: New(nil, now), t: t, now: now}
	if err := s.Load(w.Monitor, now); err != nil {
		t.Fatal(err)
	}
	w.wantState(gpuName, Unhealthy)
	if f := w.View().Findings(address); len(f) < 3 {
		t.Errorf("findings: %+v", f)
	}
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	// The text of an XID's action comes from the current rules, so it and the checksum may differ.
	texts := regexp.MustCompile(`"(action|checksum)":"[^"]*"`)
	got, err := disk.ReadFile(s.Path)
	if err != nil || !bytes.Equal(texts.ReplaceAll(got, nil), texts.ReplaceAll(raw, nil)) {
		t.Errorf("%v\n%s\n%s", err, got, raw)
	}
}

func TestStoredFieldsAreThoseOfThePresentForm(t *testing.T) {
	durabletest.CheckFields(t, "testdata", "v0.1", map[string]any{format.Kind: savedState{}})
}
