package layout

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// tree maps paths below a folder to the entries that the folder should have. While apply updates
// the folder, an unchanged entry never disappears, because another process may be reading it.
type tree map[string]entry

// entry is a file, a symbolic link or a folder. A folder entry exists even if nothing is in it.
type entry struct {
	content string
	mode    fs.FileMode
	link    string
	folder  bool
}

func (t tree) file(name, content string, mode fs.FileMode) {
	t[name] = entry{content: content, mode: mode}
}

// symlink adds a relative symbolic link at the path name. It leads to the path to. Both paths are
// relative to the tree's folder.
func (t tree) symlink(name, to string) error {
	target, err := filepath.Rel(path.Dir(name), to)
	if err != nil {
		return err
	}
	t[name] = entry{link: target}
	return nil
}

func (t tree) folder(name string) { t[name] = entry{folder: true} }

// folders returns every folder that the tree's entries need, including their parents.
func (t tree) folders() map[string]bool {
	needed := map[string]bool{".": true}
	for name, e := range t {
		if e.folder {
			needed[name] = true
		}
		for above := path.Dir(name); !needed[above]; above = path.Dir(above) {
			needed[above] = true
		}
	}
	return needed
}

// apply makes the folder at root contain exactly the entries of the tree.
func (t tree) apply(root string) error {
	folders := t.folders()
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := t.removeOthers(root, folders); err != nil {
		return err
	}
	var names []string
	for name := range t {
		names = append(names, name)
	}
	slices.Sort(names)
	for name := range folders {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := t[name].write(filepath.Join(root, name)); err != nil {
			return err
		}
	}
	return nil
}

func (t tree) removeOthers(root string, folders map[string]bool) error {
	var doomed []string
	err := filepath.WalkDir(root, func(full string, have fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, full)
		if err != nil {
			return err
		}
		wanted, listed := t[name]
		switch {
		case have.IsDir() && folders[name]:
			return nil
		case !have.IsDir() && listed && !wanted.folder && (wanted.link != "") == (have.Type()&fs.ModeSymlink != 0):
			return nil
		}
		doomed = append(doomed, full)
		if have.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	for _, full := range doomed {
		err = errors.Join(err, os.RemoveAll(full))
	}
	return err
}

// write creates the entry at the path full. If the path already has the same content, it changes
// nothing. Otherwise it renames a temporary file, so that readers never see a partial file.
func (e entry) write(full string) error {
	switch {
	case e.folder:
		return nil
	case e.link != "":
		return link(e.link, full)
	}
	if info, err := os.Lstat(full); err == nil && info.Mode() == e.mode {
		if have, err := os.ReadFile(full); err == nil && string(have) == e.content {
			return nil
		}
	}
	fresh := full + ".new"
	if err := os.WriteFile(fresh, []byte(e.content), e.mode); err != nil {
		return err
	}
	return errors.Join(os.Chmod(fresh, e.mode), os.Rename(fresh, full))
}
