package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

// floor is a minimal Prepare, with which the plugin's Prepare is compared. It reads the claim,
// writes a durable file before and after the work as the plugin writes its checkpoint record, and
// writes the CDI spec. Its files have the same sizes as the
// plugin's and lie on the same file systems.
type floor struct {
	b                    *bench
	claim                string
	records, specs       string // folders of the files
	record, spec         []byte
	alone                *floorFiles
	prepares, unprepares report.Samples
}

// floorFiles are the paths of the checkpoint record and the CDI spec that the floor writes for one
// claim.
type floorFiles struct{ record, spec string }

// newFloor prepares a claim with the first plugin and takes over the sizes of the files that the
// plugin writes.
func (b *bench) newFloor(ctx context.Context) (*floor, error) {
	s := b.subjects[0]
	f := &floor{b: b, claim: s.claims[0].Name, records: filepath.Join(b.folder, "floor"), specs: filepath.Join(b.memory, "floor")}
	if err := s.Prepare(ctx, s.claims[0]); err != nil {
		return nil, err
	}
	var err error
	if f.record, err = only(s.node.StateDir() + "/claims/*.json"); err != nil {
		return nil, err
	}
	if f.spec, err = only(s.node.CDIRoot + "/*claim*.json"); err != nil {
		return nil, err
	}
	f.alone = f.files("alone")
	return f, errors.Join(os.Mkdir(f.records, 0o750), os.Mkdir(f.specs, 0o750), s.Unprepare(ctx, s.claims[0]))
}

func (f *floor) files(name string) *floorFiles {
	return &floorFiles{filepath.Join(f.records, name+".json"), filepath.Join(f.specs, name+".json")}
}

func only(pattern string) ([]byte, error) {
	paths, err := filepath.Glob(pattern)
	if err != nil || len(paths) != 1 {
		return nil, errors.Join(err, errors.New("want exactly one file "+pattern))
	}
	return os.ReadFile(paths[0])
}

// once measures one Prepare and one Unprepare of the floor.
func (f *floor) once(ctx context.Context) error {
	err := f.prepares.Time(func() error { return f.prepare(ctx, f.alone) })
	<-time.After(pause)
	err = errors.Join(err, f.unprepares.Time(func() error { return f.unprepare(f.alone) }))
	<-time.After(pause)
	return err
}

func (f *floor) read(ctx context.Context) error {
	_, err := f.b.client.ResourceV1().ResourceClaims(namespace).Get(ctx, f.claim, metav1.GetOptions{})
	return err
}

func (f *floor) prepare(ctx context.Context, files *floorFiles) error {
	return errors.Join(f.read(ctx),
		replace(files.record, f.record, true), replace(files.record, f.record, true), replace(files.spec, f.spec, false))
}

func (f *floor) unprepare(files *floorFiles) error {
	return errors.Join(os.Remove(files.record), syncDir(filepath.Dir(files.record)), os.Remove(files.spec))
}

// replace writes data to the file at path atomically, and durably if durable is set. It does not
// use the plugin's own code, because the comparison would then hide the cost of that code.
func replace(path string, data []byte, durable bool) error {
	f, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if durable {
		err = errors.Join(err, f.Sync())
	}
	err = errors.Join(err, f.Close(), os.Rename(path+".tmp", path))
	if durable {
		err = errors.Join(err, syncDir(filepath.Dir(path)))
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
