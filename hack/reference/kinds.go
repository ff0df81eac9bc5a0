package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
)

// api is the package that defines the opaque configuration. kinds are the kinds that users can
// write for the driver's devices.
const api = "api/resource/v1beta1"

var kinds = []string{"GpuConfig", "MigDeviceConfig"}

// kindTable returns the table of the fields that a user may write. The descriptions are the
// comments of the Go types.
func kindTable(root string) (string, error) {
	types, err := declaredTypes(filepath.Join(root, api))
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("| kind | field | type | meaning |\n|---|---|---|---|\n")
	for _, kind := range kinds {
		if err := fields(&b, types, kind, kind, ""); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

func declaredTypes(dir string) (map[string]ast.Expr, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	types := map[string]ast.Expr{}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.Name()), nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if t, ok := n.(*ast.TypeSpec); ok {
				types[t.Name.Name] = t.Type
			}
			return true
		})
	}
	return types, nil
}

// fields writes a table row for each field of the struct type that the parameter of names, and for
// the fields of the structs in it. kind is the configuration's kind, and prefix the path of the
// struct in it.
func fields(b *strings.Builder, types map[string]ast.Expr, kind, of, prefix string) error {
	object, ok := types[of].(*ast.StructType)
	if !ok {
		return fmt.Errorf("%s: %s is not a struct", api, of)
	}
	for _, f := range object.Fields.List {
		if len(f.Names) == 0 {
			continue // The embedded TypeMeta has apiVersion and kind.
		}
		key := jsonKey(f)
		if key == "" || f.Doc == nil {
			return fmt.Errorf("%s: field %s of %s has no name in JSON, or no comment", api, f.Names[0].Name, of)
		}
		written, nested, err := typeOf(types, f.Type)
		if err != nil {
			return fmt.Errorf("%s: field %s of %s: %w", api, f.Names[0].Name, of, err)
		}
		fmt.Fprintf(b, "| %s | `%s` | %s | %s |\n", kind, prefix+key, written, cell(sentence(f)))
		if nested != "" {
			if err := fields(b, types, kind, nested, prefix+key+"."); err != nil {
				return err
			}
		}
	}
	return nil
}

// sentence returns a field's comment as one line, without the field's Go name at its beginning.
func sentence(f *ast.Field) string {
	text := strings.Join(strings.Fields(f.Doc.Text()), " ")
	text = strings.TrimPrefix(text, f.Names[0].Name+" ")
	text = strings.TrimPrefix(text, "is ")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

func jsonKey(f *ast.Field) string {
	if f.Tag == nil {
		return ""
	}
	key, _, _ := strings.Cut(reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json"), ",")
	return key
}

// typeOf returns in written how users write a value of type t in YAML. nested is the name of the
// struct type if t is one, else empty.
func typeOf(types map[string]ast.Expr, t ast.Expr) (written, nested string, err error) {
	switch t := t.(type) {
	case *ast.StarExpr:
		return typeOf(types, t.X)
	case *ast.MapType:
		written, _, err = typeOf(types, t.Value)
		return "map of " + written, "", err
	case *ast.Ident:
		switch t.Name {
		case "string":
			return "string", "", nil
		case "bool":
			return "boolean", "", nil
		case "int":
			return "integer", "", nil
		case "MemoryLimit":
			return "quantity", "", nil
		}
		if _, is := types[t.Name].(*ast.StructType); is {
			return "object", t.Name, nil
		}
		if base, known := types[t.Name]; known {
			return typeOf(types, base)
		}
	}
	return "", "", fmt.Errorf("the YAML form of a %T is unknown", t)
}
