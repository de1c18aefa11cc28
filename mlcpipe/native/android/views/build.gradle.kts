plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "com.example.views"
    compileSdk = 35
    defaultConfig {
        applicationId = "com.example.views"
        minSdk = 26
        targetSdk = 35
        versionCode = 1
        versionName = "1"
        ndk { abiFilters += listOf(@ABIS@) }
    }
    sourceSets["main"].jniLibs.srcDir(rootDir.resolve("jniLibs")) // the code of the models
    packaging { jniLibs { useLegacyPackaging = true } } // compressed, and unpacked when the app is installed
    buildTypes {
        release {
            isMinifyEnabled = true
            proguardFiles(getDefaultProguardFile("proguard-android-optimize.txt"))
        }
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_1_8
        targetCompatibility = JavaVersion.VERSION_1_8
    }
    kotlinOptions { jvmTarget = "1.8" }
}

dependencies { implementation(project(":mlcpipe")) }
