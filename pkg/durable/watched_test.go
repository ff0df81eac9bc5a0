package durable_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// sameNames fails the test unless w lists the names that the directory really has.
func sameNames(t *testing.T, w *durable.Watched, dir string) {
	t.Helper()
	got, err := w.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	want, err := durable.OS{}.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Fatalf("known names are %q, want %q", got, want)
	}
}

func records(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "claims")
	if err := durable.MakeDir(durable.OS{}, dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestWatchedSeesChangesOfOtherProcesses(t *testing.T) {
	w, dir, otherDir := durable.NewWatched(), records(t), records(t)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	other := durable.OS{}
	for i := range 500 {
		path := filepath.Join(dir, fmt.Sprintf("%d.json", random.IntN(20)))
		var err error
		switch random.IntN(5) {
		case 0:
			err = durable.Replace(other, path, []byte("x"))
		case 1:
			err = durable.Remove(other, path)
		case 2:
			err = durable.Replace(w, path, []byte("x")) // changes through w count too
		case 3:
			err = errors.Join(other.Create(path, nil), other.Rename(path, filepath.Join(otherDir, filepath.Base(path))))
		case 4:
			err = os.WriteFile(path, []byte("in its place"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if random.IntN(3) == 0 { // sometimes compare after few changes, sometimes after many
			sameNames(t, w, dir)
			sameNames(t, w, otherDir)
		}
		if t.Failed() {
			t.Fatalf("after %d changes of seed %d", i, seed)
		}
	}
}

func TestWatchedSurvivesInotifyQueueOverflow(t *testing.T) {
	w, dir := durable.NewWatched(), records(t)
	sameNames(t, w, dir)
	for i := range 10000 { // two events each; the kernel's queue takes 16384 by default
		path := filepath.Join(dir, "comes-and-goes")
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Remove(path)); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "stays"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	sameNames(t, w, dir)
}

func TestWatchedRereadsReplacedDirectory(t *testing.T) {
	w, dir := durable.NewWatched(), records(t)
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		sameNames(t, w, dir)
		if err := errors.Join(os.Rename(dir, dir+name), os.Mkdir(dir, 0o700)); err != nil {
			t.Fatal(err)
		}
		sameNames(t, w, dir)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if names, err := w.ReadDir(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing directory has %q, %v", names, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	sameNames(t, w, dir)
}

func TestWatchedRejectsUntrustedDirectory(t *testing.T) {
	w, dir := durable.NewWatched(), records(t)
	sameNames(t, w, dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	untrusted := new(durable.UntrustedError)
	if names, err := w.ReadDir(dir); !errors.As(err, &untrusted) {
		t.Errorf("got %q, %v", names, err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	sameNames(t, w, dir)
}

func BenchmarkList500Records(b *testing.B) {
	dir := filepath.Join(b.TempDir(), "claims")
	if err := durable.MakeDir(durable.OS{}, dir); err != nil {
		b.Fatal(err)
	}
	for i := range 500 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%036d_gpu-0000-1b-00-0.json", i)), nil, 0o600); err != nil {
			b.Fatal(err)
		}
	}
	for name, disk := range map[string]durable.FS{"read": durable.OS{}, "watched": durable.NewWatched()} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if names, err := disk.ReadDir(dir); err != nil || len(names) != 500 {
					b.Fatal(len(names), err)
				}
			}
		})
	}
}
